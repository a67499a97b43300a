"""Defines, reads and imports the plugin's configuration.

`settings` defines all settings, with `resources` for device nodes and `gpus` for GPUs. `files`
reads configuration files, and `importers` converts those of other plugins.
"""
