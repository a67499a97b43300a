"""The configuration of the plugin.

`settings` has all of it, with `resources` for device nodes and `gpus` for GPUs. `files` reads them;
`importers` convert the configuration of other plugins.
"""
