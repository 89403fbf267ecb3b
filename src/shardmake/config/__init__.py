"""The configuration: its models, reading and validation, and the tables of strategies and objectives."""
