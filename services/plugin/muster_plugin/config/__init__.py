"""The configuration of the plugin.

`settings` is everything, `document` the devices in it, with `resources` for device nodes and `gpus`
for GPUs. `files` reads them; `importers` convert the configuration of other plugins.
"""
