"""What a user may write: configuration, cluster files and the table of strategies."""
