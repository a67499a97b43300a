"""The notifier's settings, and how they are read.

`schema` and `receiver_settings` define the settings, `files` reads settings and secrets, and
`alertmanager_importer` converts an Alertmanager's configuration file.
"""
