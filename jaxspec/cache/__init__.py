"""Where KV is stored: pages, and the layout of a row's KV in them."""
