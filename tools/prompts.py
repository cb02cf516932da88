"""The demo's prompts: a document, questions about it, and texts that stand alone."""

from dataclasses import dataclass

DOCUMENT = """\
The Harbour Library of Port Ellery

The Harbour Library was founded in 1887, when the widow of a ship's chandler left her house on the quay to the
town, together with four thousand books and one condition: that the reading room should stay open for as long as a
light burned on the pier. The town council, which had hoped to sell the house, accepted the gift after a debate
that lasted two days. The first librarian, a retired pilot named Josiah Marrow, took the condition literally. He
had a bell wire strung from the lamp on the pier to his desk, and when the keeper put out the lamp at dawn the bell
rang and the last readers went home.

In its first winter the library lent books mostly to sailors, who brought them back from other ports, sometimes
years later and sometimes with a second book as an apology. Marrow entered each of these journeys in a green
ledger: the title, the name of the ship, the places the book had seen, and the state of its binding when it
returned. The ledger is still kept behind glass beside the door. Its longest entry belongs to a treatise on knots
which left in the autumn of 1891 and came home in the spring of 1904, having been twice around the Horn; a stain on
page sixty is said to be whale oil.

The great storm of 1923 flooded the ground floor to the height of the third shelf. Fishermen carried the books up
the stairs in their baskets, passing them from hand to hand in a line that reached from the door to the attic, and
only two hundred and twelve volumes were lost, nearly all of them sermons. When the water had gone, the carpenters
of the yard built new shelves of larch, raised on stone feet, and refused payment. In thanks the council gave each
of them a reader's ticket without an end date, and eleven of these tickets are still in use by their grandchildren.

Today the library has two rules that visitors find strange. No book may be lent to a reader who cannot say, in one
sentence, why she wants it; and no reader may be asked whether the sentence is true. The present librarian, Ines
Calloway, holds that the first rule teaches readers to know their own minds and the second keeps the staff from
thinking that they do. The lamp on the pier has been electric since 1931 and is no longer put out at dawn, so that
by the founder's condition the reading room never closes. Volunteers take the hours after midnight in turn. They
say that the busiest of these hours is the one before sunrise, when the boats are being made ready and someone
always needs a chart, a poem, or the tide table.

"""


@dataclass(frozen=True)
class Prompt:
    text: str
    on_document: bool = False
    shared: bool = False  # served from the document's entry alone; decode computes the rest

    @property
    def label(self) -> str:
        return ("document + " if self.on_document else "") + self.text


PROMPTS = (
    Prompt("The capital of France is"),
    Prompt("Question: Who was the first librarian of the Harbour Library?\nAnswer:", on_document=True, shared=True),
    Prompt("Question: What was lost in the storm of 1923?\nAnswer:", on_document=True),
    Prompt("Question: Which two rules does the library have today?\nAnswer:", on_document=True, shared=True),
    Prompt("Water boils at a lower temperature on a mountain than at the sea, because"),
    Prompt(
        "Here is a short recipe for onion soup. Slice four large onions thinly and cook them slowly in butter until "
        "they are brown and sweet, which takes the better part of an hour. Stir in a spoonful of flour, then"
    ),
    Prompt("In one sentence, the Harbour Library is", on_document=True, shared=True),
    Prompt(
        "Dear Ms. Okafor,\n\nThank you for your letter of the third of May about the noise from the new ventilation "
        "plant behind your house. I was sorry to read that it has kept your family awake. Our engineers visited the "
        "site on Tuesday night and measured the level at your garden wall. They found that one of the three fans "
        "runs out of balance when the wind comes from the west, and that the sound it makes is well above what we "
        "promised the neighbours when the plant was approved. The maker has agreed to replace the bearing, and until "
        "that is done we will switch this fan off between ten in the evening and six in the morning. If you should "
        "hear it during these hours all the same, please"
    ),
    Prompt("Summary of the text above in three points:\n1.", on_document=True),
    Prompt('def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'),
    Prompt(
        "The difference between a lock and a semaphore is easy to remember with a picture. A lock is the key of a "
        "single room: whoever holds it is inside, and only that person can give it back. A semaphore is a bowl with "
        "a number of tokens in it. Anybody may take a token and anybody may put one in, even somebody who never took "
        "one, and who finds the bowl empty has to wait. So when a program needs to make sure that only one thread "
        "changes a list at a time, it should use"
    ),
    Prompt(
        "A letter to the founder, written by a reader of today:\n\nDear Madam,\n\nYour lamp",
        on_document=True,
        shared=True,
    ),
)
