"""Where KV is stored: pages, and how a row's KV stands among them."""
