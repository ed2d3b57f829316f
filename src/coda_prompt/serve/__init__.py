"""HTTP service: predicts and learns, with a web page to draw and teach."""
