"""Make tables, figures, comparisons and a page from records."""
