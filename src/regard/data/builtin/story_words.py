"""The words and sentences of the stories.

In sentences {N} is the main character and {he}, {him}, {his} (capitalised: {He}, {His}) always mean that character; {F}
is the friend, {T} the thing that was wished for ("the kite"), {P} the place of the story ("the forest").
"""

NAMES = {
    "she": "Anna Bella Clara Daisy Ella Fiona Greta Hazel Ida Julia Kate Lily Mia Nora Olga Polly Rosa Sara Tilda Vera",
    "he": "Adam Ben Carl David Emil Fred Gus Henry Ivan Jack Karl Leo Max Ned Otto Paul Rob Sam Tom Victor",
}
PEOPLE = {"she": "girl princess shepherdess", "he": "boy prince shepherd"}
ANIMALS = "fox rabbit bear mouse cat dog duck frog goat hedgehog horse lamb mole pig squirrel badger"
ADJECTIVES = "little brave clever shy quiet merry lazy young poor kind curious gentle proud small funny lonely"
THINGS = (
    "kite ball drum bell harp book hat candle ring key shell feather flute basket violin map coin crown doll puppet "
    "pebble scarf whistle wagon cup mirror ribbon necklace lantern trumpet compass pearl"
)
PLACES = (  # with the word that says that something is there
    ("in", "forest"), ("in", "village"), ("in", "valley"), ("in", "garden"), ("in", "meadow"), ("in", "castle"),
    ("in", "city"), ("in", "desert"), ("in", "cave"), ("on", "island"), ("on", "hill"), ("on", "mountain"),
    ("on", "beach"), ("on", "farm"), ("at", "lake"), ("at", "harbour"), ("at", "mill"), ("at", "market"),
)  # fmt: skip
TIMES = (
    "One sunny morning", "One cold evening", "On a windy day", "One day in spring", "On a warm summer day",
    "One rainy afternoon", "Early one morning", "Late in the autumn", "On the first day of winter", "After breakfast",
)  # fmt: skip

# {A} is "a little fox", {At} is "in the forest", {a T} is "a kite"
OPENINGS = (
    "Once upon a time there was {A} called {N}.",
    "Once upon a time {A} called {N} lived {At}.",
    "Once upon a time, {At}, there lived {A} whose name was {N}.",
    "There once was {A} called {N}, who lived {At}.",
    "Long ago {A} called {N} lived {At}.",
    "This is the story of {N}, {A} that lived {At}.",
    "{N} was {A} and lived {At}.",
)
WISHES = (
    "More than anything {he} wanted {a T}.",
    "{N} had always wished for {a T}.",
    "Every night {he} dreamt of {a T}.",
    "{His} greatest wish was {a T}.",
    "{He} had heard of {a T} and could think of nothing else.",
    "{N} needed {a T} for {his} mother.",
)
JOURNEYS = (
    "{Time} {he} set out for {P} to look for {T}.",
    "{Time} {N} went to {P} to find {T}.",
    "{Time} {he} packed {his} bag and walked to {P} to look for {T}.",
    "{Time} {N} followed a narrow path to {P} to find {T}.",
    "{Time} {he} left the house and ran to {P} to find {T}.",
)
MEETINGS = (  # {B} is "a clever mole"
    "On the way {he} met {B} called {F}.",
    "There {he} met {F}, who was {B}.",
    "{His} friend {F}, {B}, came along.",
    "{B} called {F} was waiting for {him} there.",
)
OBSTACLES = (  # and what the friend does about it
    ("But a wide river lay in the way.", "built a raft for {him}"),
    ("But the bridge had fallen down.", "laid a log across the water"),
    ("But the path ended at a high wall.", "held a ladder for {him}"),
    ("But it grew dark, and {he} lost {his} way.", "lit a torch for {him}"),
    ("But the gate was locked.", "knew where another gate was"),
    ("But a heavy rock lay in the way.", "rolled it to the side with {him}"),
    ("But the snow was too deep.", "lent {him} a sledge"),
    ("But {he} grew hungry and tired.", "shared some bread with {him}"),
    ("But the mountain was too steep.", "pulled {him} up with a rope"),
    ("But {he} could not read the signs.", "read them out for {him}"),
    ("But thick thorns covered the path.", "cut a way through them"),
    ("But {he} hurt {his} foot.", "bandaged it for {him}"),
)
HELPS = (
    "{B} called {F} came by and {does}.",
    "Luckily {B} came along, whose name was {F}, and {does}.",
    '"I can help you," said {F}, {B}, and {does}.',
    "Then {F}, {B}, {does}.",
)

# What happens, by the mood it leaves the main character in. Events of different moods share many of their words.
EVENTS: dict[str, tuple[str, ...]] = {
    "happy": (
        "Under a bush {he} found {T}.",
        "{F} gave {T} to {him}.",
        "And there was {T}, right at {his} feet.",
        "An old man handed {T} to {him}.",
        "{He} opened a small box, and {T} was inside.",
        "The wind dropped {T} into {his} arms.",
        "{F} had kept {T} for {him} all the time.",
        "{He} ran a race and won {T}.",
        "{F} had hidden {T} as a surprise for {him}.",
        "All {his} friends had made {T} for {him}.",
        "The river carried {T} right to {him}.",
        "{F} mended {T} until it was as good as new.",
        "{T} was hanging from a branch, and {he} could reach it.",
        "A crow flew down and put {T} in front of {him}.",
        "{F} helped {him} dig, and deep in the mud lay {T}.",
        "The king thanked {him} and let {him} keep {T}.",
        "At the market {F} bought {T} for {him}.",
        "{He} and {F} played with {T} until the evening.",
        "{T} was not broken after all.",
        "Nobody else wanted {T}, so {he} could take it home.",
        "{He} looked behind the last door, and there stood {T}.",
        "A thief gave {T} back to {him}.",
        "Everybody remembered {his} birthday, and {F} brought {T}.",
        "When the snow melted, {T} came to light.",
    ),
    "sad": (
        "{T} fell into the river and sank.",
        "{He} looked under every bush and never found {T}.",
        "{F} had to move far away that very day.",
        "{T} was broken, and nobody could mend it.",
        "Somebody had bought {T} the day before.",
        "The wind carried {T} over the hills and out of sight.",
        "It began to rain, and {T} was washed away.",
        "{He} dropped {T} in the deep snow and could not find it.",
        "{F} fell ill and could not play any more.",
        "{He} opened a small box, but it was empty.",
        "{T} had burnt in a fire long ago.",
        "{He} came last in a race and did not win {T}.",
        "All {his} friends had gone home without {him}.",
        "{T} slipped from {his} arms and broke in two.",
        "There was not enough money to buy {T}.",
        "The old woman who had made {T} was gone for ever.",
        "{He} waited until the evening, but {F} did not come back.",
        "A wave took {T} and pulled it out to sea.",
        "{T} was only a picture on a wall.",
        "{He} had to leave {T} behind and go home.",
        "The branch was too high, and {he} could not reach {T}.",
        "Nobody remembered {his} birthday.",
        "{He} left {T} on a bench, and in the morning it was gone.",
        "{F} said goodbye at the door and did not turn round.",
    ),
    "scared": (
        "Suddenly a growl came from behind {T}.",
        "Two yellow eyes looked at {him} out of the dark.",
        "The ground began to shake under {his} feet.",
        "A black shadow moved across the wall behind {F}.",
        "The lights went out, and something breathed in front of {him}.",
        "A big dog jumped at {him} with open jaws.",
        "The branch broke, and {he} hung high over the river.",
        "A snake crept out from under {T}.",
        "Thunder crashed, and a tree fell right in front of {him}.",
        "The door fell shut behind {him}, and nobody heard {him} call.",
        "{F} was gone, and strange steps came nearer and nearer.",
        "A wolf howled behind {him}, and then another.",
        "The ice under {him} began to break.",
        "Something cold took hold of {his} feet.",
        "The boat began to fill with water, far out at sea.",
        "A giant came over the hills and reached for {him}.",
        "Smoke came under the door, and {he} could not open it.",
        "A lion stood between {him} and the way home.",
        "The rope began to tear while {he} was still hanging from it.",
        "Under {T} a viper began to hiss.",
        "{He} could not see {F} any more, and the fog grew thicker.",
        "A thousand wasps flew right at {him}.",
        "A witch looked in at the window and said {his} name.",
        "A storm pulled {F} up into the air and out of sight.",
    ),
    "angry": (
        "{F} grabbed {T} and ran away with it.",
        "{F} broke {T} on purpose.",
        "A thief took {T} out of {his} bag.",
        "{F} said that {he} had stolen {T}, and that was a lie.",
        "Somebody had painted rude words on {T}.",
        "{F} cheated in a race and won {T}.",
        "{F} had eaten all {his} food without asking.",
        "An old man kicked {T} into the mud on purpose.",
        "{F} gave {T} to somebody else, against every promise.",
        "A rude boy pushed {him} into the river and went on.",
        "Somebody had cut {T} to pieces just for fun.",
        "{F} told everybody {his} secret.",
        "{He} gave all {his} money, and the man kept {T} too.",
        "{F} mocked {him} in front of everybody.",
        "A crow took {his} food and came back to mock {him}.",
        "{F} blamed {him} for the fire, and nobody let {him} speak.",
        "The king kept {T}, although it belonged to {N}.",
        "{F} threw {T} into the river and said nothing.",
        "Some big children threw stones at {F} and would not stop.",
        "{F} hid {T} and said that it was gone.",
        "{F} pushed {him} aside and took {T}.",
        "Somebody had locked {F} in a box just for fun.",
        "{F} opened {his} letters without asking.",
        "The old woman sold {T} again, although {he} had paid for it.",
    ),
}
FEELINGS = {
    "happy": "happy glad delighted cheerful",
    "sad": "sad unhappy sorrowful miserable",
    "scared": "scared afraid frightened terrified",
    "angry": "angry cross furious mad",
}
FEELING = (
    "{N} was very {mood}.",
    "{N} was {mood}.",
    "That made {N} {mood}.",
    "{He} had never been so {mood}.",
    "How {mood} {he} was!",
    "Now {N} felt {mood}.",
)
ENDINGS: dict[str, tuple[str, ...]] = {
    "happy": (
        "{He} laughed and danced all the way home.",
        "{He} sang a song and hugged {F}.",
        "{N} and {F} had a feast and stayed friends for ever.",
        "{He} jumped for joy.",
        "That night {he} fell asleep with a smile.",
        "And {N} lived happily ever after.",
    ),
    "sad": (
        "{He} sat down and wept.",
        "Tears ran down {his} face.",
        "{He} went home slowly and did not say a word.",
        "{N} cried until the moon rose.",
        "That night {he} cried {himself} to sleep.",
        "{He} sighed and hung {his} head.",
    ),
    "scared": (
        "{He} ran home as fast as {he} could.",
        "{He} trembled and hid under a blanket.",
        "{His} heart beat fast, and {he} did not dare to move.",
        "{N} screamed and shut {his} eyes.",
        "{He} turned pale and ran for {his} life.",
        "That night {he} slept with the lamp on.",
    ),
    "angry": (
        "{He} stamped {his} foot and shouted.",
        "{His} face grew hot, and {he} clenched {his} teeth.",
        '"That is not fair!" {he} shouted.',
        "{N} slammed the door and would not talk to anybody.",
        "{He} shook {his} fist.",
        "{He} swore never to forgive that.",
    ),
}
