"""Records all inputs of health's detector, and replays them under another policy.

`recorder` writes the recording while the detector runs, `recording` defines its format and reads
it, `player` feeds it to a real detector in recorded time, and `command` is `muster replay`, which
compares the alerts.
"""
