"""From an empty installation to the first admitted request, as a person does it: in a browser, along the setup guide.

    PICTURES=/some/folder python -m pytest tests/e2e/test_first_request.py -s

keeps a picture of each page and prints the steps with their time. Web, worker, beat, controller and agent are real.
"""

import os
import re
import time
from pathlib import Path

import pytest
import requests

from controlplane.embedded.ports import free_port
from controlplane.supervisor.supervisor import Supervisor
from tests.chaos.job_system import wait_until
from tests.e2e.empty_system import ADMINISTRATOR, PASSWORD, EmptySystem, enrol
from tests.jobs.page_site import WATCH_POLICY, chromium

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.slow]


class Newcomer:
    """Who follows the guide; counts the pages that were sent and the fields that were filled in."""

    def __init__(self, page) -> None:
        self.page = page
        self.began = time.monotonic()
        self.pictures = 0
        self.fields = 0
        self.steps: list[tuple[str, float]] = []

    def picture(self, name) -> None:
        self.pictures += 1
        if folder := os.environ.get("PICTURES"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.page.screenshot(path=str(Path(folder) / f"{self.pictures:02}-{name}.png"), full_page=True)

    def fill(self, **values) -> None:
        for name, value in values.items():
            self.page.fill(f"main [name={name}]", value)
            self.fields += 1

    def choose(self, **values) -> None:
        for name, value in values.items():
            self.page.select_option(f"main [name={name}]", value)
            self.fields += 1

    def tick(self, box) -> None:
        self.page.check(f"main {box}")
        self.fields += 1

    def press(self, button) -> None:
        """Sends the page; a page that comes back with a problem ends the walk."""
        self.page.click(f"main button:text-is('{button}')")
        self.page.wait_for_load_state()
        self.picture(re.sub(r"\W+", "-", button.lower()))
        problem = self.page.query_selector(".error-summary")
        assert problem is None, problem.inner_text()
        self.steps.append((button, time.monotonic() - self.began))

    def reviewed(self, button, review="Review changes") -> None:
        """The form, its review with a reason, and saved."""
        self.press(review)
        self.fill(reason="first set-up")
        self.press(button)

    def next_step(self, title) -> None:
        """Back at the guide; its next step is the one that the walk expects."""
        back = self.page.query_selector("a:text-is('Back to the steps')")
        if back is not None:
            back.click()
        assert self.page.url.endswith("/setup/")
        self.page.wait_for_selector("[aria-current=step]")
        said = self.page.inner_text("[aria-current=step]")
        assert title in said, said
        self.picture(f"guide-{re.sub(r'[^a-z]+', '-', title.lower())}")
        self.page.click("[aria-current=step] a.button")
        self.page.wait_for_load_state()
        self.picture(f"open-{re.sub(r'[^a-z]+', '-', title.lower())}")


@pytest.fixture
def system(tmp_path):
    with Supervisor(tmp_path / "var", say=lambda line: None) as supervisor:
        made = EmptySystem(tmp_path, supervisor)
        made.start()
        yield made


def test_a_newcomer_comes_from_nothing_to_an_admitted_request(system, capsys):
    with chromium() as browser:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=system.address)
        context.add_init_script(WATCH_POLICY)
        page = context.new_page()
        page.set_default_timeout(60_000)
        complaints = []
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        one = Newcomer(page)
        agent = None
        try:
            agent = walk(one, system)
        finally:
            if agent is not None:
                agent.terminate()
                agent.wait(20)
        assert complaints == [], complaints
    with capsys.disabled():
        for button, at in one.steps:
            print(f"\n  {at:6.1f} s  {button}", end="")
        print(f"\n  {len(one.steps)} pages sent, {one.fields} fields filled in, {one.steps[-1][1]:.1f} s")


def walk(one, system):
    page = one.page
    page.goto("/")
    one.picture("sign-in")
    one.fill(username=ADMINISTRATOR, password=PASSWORD)
    one.press("Sign in")

    one.next_step("A class of work")
    one.fill(slug="chat")
    one.reviewed("Create class", "Review and create")

    one.next_step("A pool")
    one.fill(slug="small", model="llama-8b", gpu_type="L40S")
    one.choose(interactive_class="chat")
    one.reviewed("Create pool", "Review and create")

    one.next_step("Slots of the pool")
    one.fill(names="i1 i2")
    one.reviewed("Add slots", "Review and create")

    one.next_step("Rates")
    page.click("a:text-is('New rate')")
    one.fill(nanos_per_slot_hour="2.50")
    one.reviewed("Add cost rate", "Review and create")
    page.click("a:text-is('New card')")
    one.fill(prompt_nanos_per_mtok="0.40", output_nanos_per_mtok="1.20")
    one.reviewed("Add rate card", "Review and create")

    one.next_step("A tenant")
    one.fill(slug="acme", name="Acme")
    one.tick("[name=classes][value=chat]")
    one.reviewed("Create tenant")

    one.next_step("A first push")
    if page.query_selector("[name=seen]"):
        one.tick("[name=seen]")
    one.fill(reason="first set-up")
    one.press("Push this configuration")

    one.next_step("An agent")
    one.press("Make a token")
    listen = f"127.0.0.1:{free_port()}"
    agent = enrol(system, page.inner_text("#command"), listen, f"127.0.0.1:{free_port()}")
    try:
        page.goto("/setup/")
        page.wait_for_selector("[aria-current=step]:has-text('An API key')")

        one.next_step("An API key")
        one.fill(name="first program")
        one.tick("[name=classes][value=chat]")
        one.press("Create key")
        secret = page.inner_text("#secret")

        page.click("a:text-is('Back to the steps')")
        example = page.inner_text("#curl")
        assert f"http://{listen}/" in example and "llama-8b" in example, example
        answer = ask(example.replace("KEY", secret))
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"]
        page.wait_for_selector("text=the installation works")
        one.picture("finished")
        one.steps.append(("The first request is counted", time.monotonic() - one.began))
        page.click("main a:text-is('Tenants')")
        assert page.query_selector("a:text-is('Back to the steps')") is None
    except BaseException:
        agent.terminate()
        raise
    return agent


def ask(command):
    """The request of the example, once an agent answers it: it may not have applied the first revision yet."""
    url = re.search(r"curl (\S+)", command)[1]
    headers = dict(header.split(": ", 1) for header in re.findall(r'-H "([^"]+)"', command))
    body = re.search(r"-d '([^']+)'", command)[1]
    answers = []

    def answered():
        answers.append(requests.post(url, headers=headers, data=body, timeout=30))
        return answers[-1].status_code == 200

    wait_until(answered, lambda: answers[-1].text, 30, every_s=0.5)
    return answers[-1]
