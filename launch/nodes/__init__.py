"""The nodes of a program, one small class each."""
