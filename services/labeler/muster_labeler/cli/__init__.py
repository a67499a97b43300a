"""The commands `muster check`, `label-gpus`, `unlabel-gpus` and `gpu-name`.

`commands` has the options and the read-only commands; `label_gpus` those that write.
"""
