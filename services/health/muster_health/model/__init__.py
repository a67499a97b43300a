"""Defines the data that health's packages exchange; imports none of those packages.

`signals` defines the inputs and outputs of the detector and the answers from Kubernetes, `steps`
the inputs and decisions of one plugin, `alerts` an alert, `snapshot` the saved state of a plugin,
`config` the settings, and `limits` the reasons for not storing or reading data.
"""
