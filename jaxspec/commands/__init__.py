"""The commands of `jaxspec`, one module each: a dataclass of options with a `run` method."""
