-- site-a's journal of two rounds, as it was written before records named the digest of the memory.
-- Its signing key is 32 bytes of 1.
BEGIN TRANSACTION;
CREATE TABLE heads (
    seq INTEGER PRIMARY KEY,
    hash TEXT NOT NULL,
    signature TEXT NOT NULL
);
INSERT INTO "heads" VALUES(4,'e4e5b97973f0f483c4ecb4fefc53ff618bda58e2df1dc504752f68feac57b384','4c04db15345177b2464e4b9e168ec9d21d1516f3f45d3555f246fe5053244b45ab8df2a555f3a392c05576491b958e70d53fa968cf590f8405675f951314550a');
INSERT INTO "heads" VALUES(7,'67b84506f07a513879b8d3173301f7a74ef22b8719274f9fd757a9d557913057','6150ff93074abd7116f1d6aa25808d9be8f5a03d49be3ba3151439122e4f0e881504aeb282fa3faba67daa60d1f0fdf813c06987967599f697577d4c00a3150e');
CREATE TABLE memory (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO "memory" VALUES('barrier','{"announced":{"digest":"089649f1b90ecf126ce763d0b21e2155e5a4cbdf7551ee1546e0c2f9e9cc1e4d","generation":0,"peer":"site-a","round":2},"blocked":[],"decision":null,"generation":0,"generations":{},"pardoned":{},"paused":false,"quarantined":{},"recovering":false,"round":2,"used":{},"vouched":{}}');
INSERT INTO "memory" VALUES('best','{"loss":1.25,"model":"19bdb263b191cac788fb1037eda3961dd5f6427ff0fa15e246598c065f8b8771","round":0}');
INSERT INTO "memory" VALUES('dtype','"float32"');
INSERT INTO "memory" VALUES('manifest','{"manifest":{"base":null,"dtype":"float32","federation":"ward","lamport":1,"raw_bytes":10,"samples":20,"schema":"40280a7f8651dcfc01f58383c62a95b70a619dce89eae463112679b39962557d","update":{"digest":"089649f1b90ecf126ce763d0b21e2155e5a4cbdf7551ee1546e0c2f9e9cc1e4d","generation":0,"peer":"site-a","round":2}},"signature":"ed219794db006732305e389eb5e014b90e578cb76eed9907989bc3f2e4c7bc1ce136eacc867b249490d0bdce577cb0724a9175c6bc7590e9878127c4b95e3c0b"}');
INSERT INTO "memory" VALUES('models','["f390f6090fe9dee4214861f2d8a3f4621b9e4579da8f07e95cce1ffe7b553421","19bdb263b191cac788fb1037eda3961dd5f6427ff0fa15e246598c065f8b8771"]');
INSERT INTO "memory" VALUES('offered','["089649f1b90ecf126ce763d0b21e2155e5a4cbdf7551ee1546e0c2f9e9cc1e4d","0aea2e29c17d2f6700f2a3fc5b1c15d6bbec413661d2c1c90778d19374baa73f"]');
INSERT INTO "memory" VALUES('opinions','{"site-b":{"accepted":true,"digest":"b7beb698fcc235afa04f4b929ae40bb04ca231084e86e07fe797f0f922a3cffe","reason":"ok","round":1},"site-c":{"accepted":false,"digest":"72425a821f6b92fbc6cab33017d8d1714fe4655d90ca6dac0ede209b8e51953c","reason":"too_far","round":1}}');
INSERT INTO "memory" VALUES('rule','"lightyear"');
INSERT INTO "memory" VALUES('rule_state','{}');
INSERT INTO "memory" VALUES('schema','"40280a7f8651dcfc01f58383c62a95b70a619dce89eae463112679b39962557d"');
INSERT INTO "memory" VALUES('witnessed','{"site-b":{"hash":"d607b4a5076ab8b500f2a6c48d7509dd31200913a279b0183c6732137d11fdac","seq":7,"signature":"ecd2aaf32c94ce01250419f3dfd7a6732920969137ac7343432cbd08e60b0a6e783a52be389ee602158080ceca99b3719ea0259d206fc64f4e6c43903a4b7503"},"site-c":{"hash":"1707ab1d7eb783958c75c5dfea8242d55829dfdd2a28427224582351650220b0","seq":7,"signature":"a49211b39fde1eac7d34dba5d260dc28e6d33438ac230a77ca5c677ac73e08cffd7b46fd0e9e58fe6c8c377acc67df92d3e31145efdcca5f02942882bc67d103"}}');
INSERT INTO "memory" VALUES('work','{"carry":"a39645bee3470fc34c0143e7199e05579b234aa1c85656d1eeb8b08d4cdea6bb","metrics":{"loss":1.5},"outgoing":"089649f1b90ecf126ce763d0b21e2155e5a4cbdf7551ee1546e0c2f9e9cc1e4d","own":"089649f1b90ecf126ce763d0b21e2155e5a4cbdf7551ee1546e0c2f9e9cc1e4d","raw_bytes":10,"samples":20}');
CREATE TABLE newest (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    seq INTEGER NOT NULL,
    hash TEXT NOT NULL
);
INSERT INTO "newest" VALUES(1,8,'6bd81f13d2fd212ff6c57be8954aea38e1632749bcedae1a5569396eae623561');
CREATE TABLE records (
    seq INTEGER PRIMARY KEY,
    wall_ns INTEGER NOT NULL,
    lamport INTEGER NOT NULL,
    round INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body TEXT NOT NULL,
    hash TEXT NOT NULL
);
INSERT INTO "records" VALUES(1,1700000000000000000,1,0,'start','{"federation":"ward","initial_model":"cc4d1502c5d35c14d4e537b6b633686026cb814a91a37833645914d6f068550e","rule":"lightyear","signing_key":"8a88e3dd7409f195fd52db2d3cba5d72ca6709bf1d94121bf3748801b40f6f5c","site":"site-a"}','e1f98c039fc7b251dfd038c10ee9938614757ab222642ba890fe7192444e8dfd');
INSERT INTO "records" VALUES(2,1700000001000000000,2,0,'seal','{"carry":"a39645bee3470fc34c0143e7199e05579b234aa1c85656d1eeb8b08d4cdea6bb","metrics":{"loss":1.5},"own":"66871a991683737a42a0ed2e8e8cec8264bbda87b6f3471c5fb6055a06b4425c","samples":20,"update":{"digest":"66871a991683737a42a0ed2e8e8cec8264bbda87b6f3471c5fb6055a06b4425c","generation":0,"peer":"site-a","round":0}}','745cab29848dcba9dc088745d334b0fa53a6cb05745537a3bc30fd75d19aca02');
INSERT INTO "records" VALUES(3,1700000002000000000,3,0,'decision','{"accepted":[{"digest":"176f4fc5af2b62198576adcb924d38df411bc7c6f69111741ba724e4213181d1","generation":0,"peer":"site-b","round":0}],"cause":"all","round":0,"rule_state":{},"verdicts":[{"accepted":true,"checks":{"agreement":0.81,"distance":0.31,"distance_max":0.5,"regret":0.02,"regret_max":0.4,"tau":0.6},"digest":"176f4fc5af2b62198576adcb924d38df411bc7c6f69111741ba724e4213181d1","peer":"site-b","reason":"ok","score":0.81,"weight":0.3333333333333333},{"accepted":false,"checks":{"agreement":0.81,"distance":1.9,"distance_max":0.5,"regret":0.02,"regret_max":0.4,"tau":0.6},"digest":"d4f5a36fd2db9e8c1e3714b2e29d859473251be0f85757add7bdf9593a21d7c4","peer":"site-c","reason":"too_far","score":0.81,"weight":0.0}],"why":"all 2 peers delivered"}','00a045e28aff224b6fdb8cc55ad16d8a3f27ec039d95f8eb39167734286ceed7');
INSERT INTO "records" VALUES(4,1700000003000000000,4,0,'commit','{"heads":{},"metrics":{"loss":1.25},"model":"19bdb263b191cac788fb1037eda3961dd5f6427ff0fa15e246598c065f8b8771"}','e4e5b97973f0f483c4ecb4fefc53ff618bda58e2df1dc504752f68feac57b384');
INSERT INTO "records" VALUES(5,1700000004000000000,5,1,'seal','{"carry":"a39645bee3470fc34c0143e7199e05579b234aa1c85656d1eeb8b08d4cdea6bb","metrics":{"loss":1.5},"own":"0aea2e29c17d2f6700f2a3fc5b1c15d6bbec413661d2c1c90778d19374baa73f","samples":20,"update":{"digest":"0aea2e29c17d2f6700f2a3fc5b1c15d6bbec413661d2c1c90778d19374baa73f","generation":0,"peer":"site-a","round":1}}','935e7d02eb7a6ad6b0860e4019d98299db468814c3d101a8b96afe84ce2811de');
INSERT INTO "records" VALUES(6,1700000005000000000,6,1,'decision','{"accepted":[{"digest":"b7beb698fcc235afa04f4b929ae40bb04ca231084e86e07fe797f0f922a3cffe","generation":0,"peer":"site-b","round":1}],"cause":"all","round":1,"rule_state":{},"verdicts":[{"accepted":true,"checks":{"agreement":0.81,"distance":0.31,"distance_max":0.5,"regret":0.02,"regret_max":0.4,"tau":0.6},"digest":"b7beb698fcc235afa04f4b929ae40bb04ca231084e86e07fe797f0f922a3cffe","peer":"site-b","reason":"ok","score":0.81,"weight":0.3333333333333333},{"accepted":false,"checks":{"agreement":0.81,"distance":1.9,"distance_max":0.5,"regret":0.02,"regret_max":0.4,"tau":0.6},"digest":"72425a821f6b92fbc6cab33017d8d1714fe4655d90ca6dac0ede209b8e51953c","peer":"site-c","reason":"too_far","score":0.81,"weight":0.0}],"why":"all 2 peers delivered"}','8a496fa086ade41bd0159772f80f134bca831606e90a60151d6e19b9f10fd2b4');
INSERT INTO "records" VALUES(7,1700000006000000000,7,1,'commit','{"heads":{"site-b":{"hash":"94787404ad24ccb5ca82530419b13416afdbccabae10926caf1b2d0cf41bc4cd","seq":4,"signature":"b2e6d07d986e6cddd29e15165dddfee7af305bf86fdd6bef8b15778c47852a358fb916813962e2f0bd53f39014f5e87ba5883860d3055ad30c5796a9b8f81b03"},"site-c":{"hash":"818b067e736cba2dd048b19eb11d4e902a8dc79cd2ffab370b7be49c6d899ea3","seq":4,"signature":"3dd7cdc54805afa863c26d85270fee8e7f75bbe87093351ade251ed5cad45cc69015fc58364d11193de120e2723b54ec0e1dc82a3efa5ca97d9859b5192c6e0f"}},"metrics":{"loss":1.25},"model":"f390f6090fe9dee4214861f2d8a3f4621b9e4579da8f07e95cce1ffe7b553421"}','67b84506f07a513879b8d3173301f7a74ef22b8719274f9fd757a9d557913057');
INSERT INTO "records" VALUES(8,1700000007000000000,8,2,'seal','{"carry":"a39645bee3470fc34c0143e7199e05579b234aa1c85656d1eeb8b08d4cdea6bb","metrics":{"loss":1.5},"own":"089649f1b90ecf126ce763d0b21e2155e5a4cbdf7551ee1546e0c2f9e9cc1e4d","samples":20,"update":{"digest":"089649f1b90ecf126ce763d0b21e2155e5a4cbdf7551ee1546e0c2f9e9cc1e4d","generation":0,"peer":"site-a","round":2}}','6bd81f13d2fd212ff6c57be8954aea38e1632749bcedae1a5569396eae623561');
CREATE INDEX records_by_kind ON records (kind, round);
COMMIT;
