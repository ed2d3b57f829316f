"""A service that answers while it learns, and a page to draw, teach and see."""
