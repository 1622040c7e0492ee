"""Garbage collection: graphs are millions of small objects, and each full collection visits all of torch and transformers."""

import gc


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a quarter of the time of the tests otherwise
