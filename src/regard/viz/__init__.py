"""Pictures: scenes, heat maps, charts, views of a trace, and the files and page that show them."""
