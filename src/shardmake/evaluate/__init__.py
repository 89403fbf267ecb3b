"""Compare the base model with the tuned model: loss, perplexity, answers, benchmark tasks."""
