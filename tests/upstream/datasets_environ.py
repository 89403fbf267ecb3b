"""`Dataset.map` with several processes leaves another object as ``os.environ``."""

import os

from datasets import Dataset

before = os.environ
Dataset.from_dict({"number": [1, 2]}).map(lambda row: row, num_proc=2)
os.environ["ADDED_LATER"] = "1"
print("os.environ is the object that it was:", os.environ is before)
print("a variable that was set afterwards is in the old one:", "ADDED_LATER" in before)
