"""Model, strategy and hardware to bytes, term by term."""
