"""Defines, reads and imports the plugin's configuration.

`settings` defines all settings, with `resources` for device nodes, `gpus` for GPUs and `watch` for
plugins that muster does not run. `files` reads configuration files, `importers` converts those of
other plugins, and `daemonsets` generates DaemonSets for the label values in `nodes`.
"""
