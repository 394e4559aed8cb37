"""Tables, comparisons and the page that people read."""
