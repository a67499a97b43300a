"""What the packages of health exchange; imports nothing else of it.

`signals` are the inputs and outputs of the detector, `steps` those of one plugin, `facts` what
Kubernetes answers, `alerts` an alert, `snapshot` what is stored of a plugin, `config` the settings.
"""
