"""Where Muon's momentum lives between steps, and as which bytes.

`codecs` turns a rectangle of momentum into a record of bytes (fp32, bf16 or blockwise int8) and back. The other
modules keep such records on the device, in host memory or in files. Nothing here knows Megatron or collectives.
"""
