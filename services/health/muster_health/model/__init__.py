"""The data that health's packages exchange; imports none of those packages.

`signals` are the inputs and outputs of the detector, with what Kubernetes answers; `steps` are
those of one plugin. `alerts` is an alert, `snapshot` what is stored of a plugin, `config` the
settings.
"""
