"""Push the final model to a folder, an object store or the hub, and verify what arrived."""
