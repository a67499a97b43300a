"""The commands `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.

`commands` declares them, and runs `gpu-name`; `options` has what they share; `check` and
`label_gpus` run the others.
"""
