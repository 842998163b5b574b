"""What an answer of the test client says, however its view streams it."""

import asyncio


def body_of(response) -> bytes:
    """The whole of it."""
    if not response.streaming:
        return response.content
    return asyncio.run(_pulled(response)) if response.is_async else b"".join(response)


async def _pulled(response) -> bytes:
    return b"".join([piece async for piece in response])
