"""The conformance battery: `jaxspec.testing` is its public name."""
