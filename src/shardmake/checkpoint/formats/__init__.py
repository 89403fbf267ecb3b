"""Read the checkpoint formats of DeepSpeed, FSDP, PEFT and Hugging Face as byte ranges."""
