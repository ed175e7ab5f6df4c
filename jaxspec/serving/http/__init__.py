"""A server with OpenAI's routes over an engine; needs the extra `serve`."""
