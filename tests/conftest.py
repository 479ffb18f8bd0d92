"""Keeps the C++ libraries' chatter out of the tests' output, as the launcher does."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
