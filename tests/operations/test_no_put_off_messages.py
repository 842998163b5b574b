"""No message waits in the broker for its time: a broker that hands it out again after its visibility timeout, or loses
it at a restart, would run it many times or never. What is due later stands in a row that a sweep reads.
"""

import ast

from tests.operations.source_text import parsed

PUT_OFF = {"eta", "countdown"}


def test_no_call_puts_a_message_off():
    found = [
        f"{path}:{node.lineno}"
        for path, tree in parsed().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and PUT_OFF & {keyword.arg for keyword in node.keywords}
    ]
    assert found == []
