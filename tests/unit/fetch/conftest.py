from tests.bucket import bucket, server

__all__ = ["bucket", "server"]
