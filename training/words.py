"""The words that the invented world is made of: names, values, and made-up ones."""

from __future__ import annotations


def _join(starts: str, ends: str) -> tuple[str, ...]:
    return tuple(a + b for a in starts.split() for b in ends.split())


FIRST_NAMES = _join(
    "Al Bel Cor Da El Fen Gal Ha Il Jo Ka Lo Mi Na Or Pe Ra Sa Te Va",
    "dan ra lin mira nor ris ven wyn",
)
SURNAMES = _join(
    "Ash Bram Cald Dor Ever Fal Gren Hol Ing Kest Lor Mar Nor Oak Pell Quill Ros Stan Thorn Ul "
    "Var Wend Yar Zel",
    "ane berg by den field gate ley mont ridge son wick worth",
)
TOWNS = _join(
    "Ar Bir Cas Dun Es Fir Gor Hel Is Kar Lin Mol Nes Ost Pol Rov Sul Tir Vel Wes",
    "ava ente holm ia mouth ola stad um",
)
RIVERS = _join("Ad Bro Ce Du Fe Gli Ka Lu", "na ver ssa reth lm")
REGIONS = _join("Aqua Boro Cala Dela Fara Goro Lusi Mora", "land mark nia vale")
SIDES = (
    "North South East West Upper Lower Port Old New Great Little Fort Lake Mount Castle Bridge"
).split()
ORG_KINDS = (
    "Foundry Brewery Press Bank Theatre Museum Institute Library Orchestra Shipyard Bakery Mill "
    "Society Observatory Pottery Nursery Academy Clinic Hotel Circus Garage Dairy Tannery Choir"
).split()
ADJECTIVES = (
    "Silent Golden Broken Hidden Burning Frozen Distant Crooked Bitter Gentle Hollow Velvet Wild "
    "Ancient Pale Lonely Restless Scarlet Secret Sunken Twisted Weary Winter Wooden Patient Iron "
    "Crystal Endless Faithful Forgotten Humble Midnight Northern Quiet Rusty Salted Shining Stolen "
    "Stubborn Wandering"
).split()
NOUNS = (
    "Harbour Garden Lantern Mirror Orchard Compass Bridge Clock Feather Letter Meadow Needle "
    "Ocean Palace Ribbon Shadow Tower Violin Window Anchor Basket Candle Desert Engine Forest "
    "Glacier Hammer Island Journey Kingdom Ladder Mountain Nest Oath Pearl Quarry Ring Staircase "
    "Thread Umbrella Valley Whistle Yard Bell Cradle Door Echo Fountain Gate Horizon"
).split()

JOBS = (
    "baker carpenter teacher painter doctor lawyer pilot sailor farmer tailor barber gardener "
    "librarian mechanic plumber sculptor translator watchmaker blacksmith banker chemist dentist "
    "fisherman glazier judge miner nurse potter surgeon weaver"
).split()
INSTRUMENTS = (
    "flute cello violin trumpet piano harp guitar clarinet drum oboe trombone banjo lute organ "
    "zither mandolin bassoon accordion horn viola"
).split()
SUBJECTS = (
    "botany law medicine history physics chemistry music geology astronomy logic grammar "
    "philosophy economics zoology geometry statistics theology anatomy rhetoric optics"
).split()
COLOURS = (
    "red blue green yellow purple teal white black grey brown pink turquoise silver crimson "
    "beige violet scarlet maroon lilac bronze"
).split()
ANIMALS = (
    "dog cat parrot goat horse rabbit falcon tortoise donkey fox lion bear wolf stork heron "
    "swan raven badger beaver lizard"
).split()
PRODUCTS = (
    "cheese glass paper silk wine honey bells ropes boots clocks soap salt lace knives candles "
    "barrels carpets hats kites lenses maps mustard needles pipes rugs sails tiles toys vinegar "
    "wool"
).split()
TOPICS = (
    "love war friendship revenge greed hope exile freedom jealousy courage memory grief justice "
    "loneliness betrayal pride poverty childhood faith ambition"
).split()
GENRES = (
    "novel comedy tragedy ballad fable romance thriller play poem satire saga drama sonnet "
    "chronicle parody"
).split()
EVENT_FIRSTS = (
    "Autumn Blossom Cherry Comet Cobalt Dragon Ember Falcon Frost Granite Harvest Heather Hazel "
    "Ironwood Juniper Lavender Maple Moonlight Nightfall Olive Peacock Pilgrim Poppy Rainbow "
    "Saffron Solstice Starlight Sunrise Thistle Thunder Tulip Willow Birch Canyon Cedar Clover "
    "Crescent Driftwood Eagle Firefly Lagoon Magnolia Meteor Nutmeg Orchid Primrose Sapphire Walnut"
).split()
EVENT_KINDS = (
    "Regatta Fair Marathon Congress Parade Tournament Gala Jubilee Carnival Auction Derby Pageant "
    "Rally Banquet Symposium Procession Festival Ceremony Concert Race Contest Market Exhibition "
    "Summit"
).split()
PRIZES = (
    "cup medal sword crown shield statue trophy goblet diamond chain plate brooch sceptre vase "
    "bracelet pendant"
).split()
YEARS = tuple(str(year) for year in range(1820, 1980))
MONTHS = (
    "January February March April May June July August September October November December"
).split()
DATES = tuple(f"{day} {month}" for month in MONTHS for day in range(1, 29))
FULL_DATES = tuple(f"{date} {year}" for date in DATES for year in YEARS[::5])
EMBLEMS = tuple(f"{colour} {animal}" for colour in COLOURS for animal in ANIMALS)

MADE_UP = _join(
    "blo da fre gi ko lu mip ne pro quo ril su tam vo wix zu",
    "bbin ck dra fen g lt nk ppo rv sh",
)
"""Words without a meaning, for demonstrations."""
LABELS = _join("Dax Fep Glor Jun Kiv Morp Nax Plim Spo Trel Vusk Wug", "a en ist or")
"""Names of the classes that demonstrations assign."""
