"""Keeps the state of a whole fleet for programs that show it: the console and `muster top`."""
