"""Take the picture of TensorBoard that README.md shows, and print which curves are in it.

    python docs/screenshot.py runs docs/tensorboard.png

Needs tests/requirements.txt, and Chromium: apt-get install chromium
"""

import shutil
import subprocess
import sys

from playwright.sync_api import sync_playwright


def main(folder, picture):
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", "0"]
    with (
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server,
        sync_playwright() as playwright,
    ):
        address = next(
            word for line in server.stderr for word in line.split() if word.startswith("http://")
        )
        # Chromium refuses its sandbox to root
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = browser.new_page(viewport={"width": 1200, "height": 1040})
        page.goto(f"{address}?smoothing=0&tagFilter=accuracy|loss#timeseries")
        page.get_by_text(
            "Ignore outliers in chart scaling"
        ).click()  # else it cuts off the first epoch
        page.get_by_role("button", name="Settings").last.click()  # which closes them
        page.wait_for_load_state("networkidle")
        # The page does not say when it has drawn the curves (a canvas): once no row comes any more.
        rows = page.locator("card-view tb-data-table-content-row")
        rows.first.wait_for(state="attached")
        shown = 0
        while rows.count() > shown:
            shown = rows.count()
            page.wait_for_timeout(2000)
        page.screenshot(path=picture)
        for card in page.locator("card-view:has(tb-truncated-path)").all():
            runs = [
                row.split()[0]
                for row in card.locator("tb-data-table-content-row").all_inner_texts()
            ]
            print(
                f"{card.locator('tb-truncated-path').get_attribute('title')}: {', '.join(runs)}",
                flush=True,
            )
        browser.close()
        server.terminate()


if __name__ == "__main__":
    main(*sys.argv[1:])
