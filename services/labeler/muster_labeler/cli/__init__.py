"""The commands `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.

`commands` declares them, `options` has what they share; `check`, `label_gpus` and `gpu_name` run
them.
"""
