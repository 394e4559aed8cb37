"""Arrays of one rank: the libraries that hold them, local products, memory."""
