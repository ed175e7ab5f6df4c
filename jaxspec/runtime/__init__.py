"""The process around the library: compilation, directories, what it runs on."""
