"""The process around the library: compilation, directories, devices."""
