"""Shardmake: distributed fine-tuning that fits, runs, survives and ends as a model people can load."""

__version__ = "0.1.0"
