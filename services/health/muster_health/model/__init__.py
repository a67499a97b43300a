"""The data that health's packages exchange; imports none of those packages.

`signals` are the inputs and outputs of the detector, `steps` those of one plugin, `facts` what
Kubernetes answers, `alerts` an alert, `snapshot` what is stored of a plugin, `config` the settings.
"""
