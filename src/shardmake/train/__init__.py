"""What the ranks run: Hugging Face's Trainer under the rendered files, watched and sealed."""
