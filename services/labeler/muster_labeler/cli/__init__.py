"""The commands `muster check`, `label-gpus`, `unlabel-gpus`, `uninstall` and `gpu-name`.

`commands` declares them and runs `gpu-name`; `options` defines their common options; `check`,
`label_gpus` and `uninstall` run the others.
"""
