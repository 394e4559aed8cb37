"""Draw figures."""

# The formats of files, without dates and versions: the same figure gives the same file.
METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
