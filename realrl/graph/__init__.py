"""The declared algorithm: calls (`mfc`), the dataflow graph they form (`build`), and its pictures (`draw`)."""
