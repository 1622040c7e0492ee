"""Settings that hold for every test. No test asks the Hub for anything, and tiny models need one thread.

Garbage collection: graphs are millions of small objects, and each full collection visits all of torch and transformers.
"""

import gc
import os

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)  # a quarter of the time of the tests otherwise
