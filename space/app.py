"""The calculator as a Hugging Face Space: copy this folder into one."""

from tunecast.web.page import build

page = build()

if __name__ == "__main__":
    page.launch()
