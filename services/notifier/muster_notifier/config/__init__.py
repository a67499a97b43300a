"""The notifier's settings, and how they are read.

`schema` and `receiver_settings` hold the settings, `files` reads them and secrets, and
`alertmanager_importer` makes them from an Alertmanager's configuration file.
"""
