"""Merge sharded checkpoints into a Hugging Face folder at disk speed, in bounded memory, and prove the result.

A checkpoint's metadata is read without its tensors and without running anything from it (`unpickle`), a reader per
format (`deepspeed`, `dcp`, `folder`) says which byte ranges make up each tensor (`contents`), `layout` fixes names,
shards and headers, `writer` streams the bytes, and `verify` reads the result again.
"""
