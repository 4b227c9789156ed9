"""The calculator page: the public functions behind a Gradio form, without any logic of its own."""
